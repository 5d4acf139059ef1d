"""Models as three pure functions (embed, layer, head) over plain parameter trees.

A model knows nothing of schedules: it says what one layer computes on a device, alone or together with
those that share the layer, and how embedding and head do. A family of models is one value in the table FAMILIES.
"""

from jaxpipe.models.anatomy import Anatomy, ParameterShape
from jaxpipe.models.bert import BERT, BertConfig
from jaxpipe.models.cross_entropy import Vocabulary
from jaxpipe.models.deepseek import DEEPSEEK_V3, DeepseekConfig
from jaxpipe.models.family import FAMILIES, GIVEN, Family, ModelConfig, family_named, register_family
from jaxpipe.models.flops import model_flops
from jaxpipe.models.gpt import GPT, GPTConfig
from jaxpipe.models.gpt_oss import GPT_OSS, GptOssConfig
from jaxpipe.models.language_model import LanguageModel
from jaxpipe.models.llama import LLAMA, LlamaConfig
from jaxpipe.models.mixture import MIXTRAL, QWEN3_MOE, MixtureConfig
from jaxpipe.models.parameters import parameter_shapes
from jaxpipe.models.token_loss import TokenLoss
from jaxpipe.models.token_values import TokenValues, token_values

for _family in (GPT, BERT, LLAMA, MIXTRAL, QWEN3_MOE, GPT_OSS, DEEPSEEK_V3):
    register_family(_family)

__all__ = [
    "FAMILIES",
    "GIVEN",
    "Anatomy",
    "BertConfig",
    "DeepseekConfig",
    "Family",
    "GPTConfig",
    "GptOssConfig",
    "LanguageModel",
    "LlamaConfig",
    "MixtureConfig",
    "ModelConfig",
    "ParameterShape",
    "TokenLoss",
    "TokenValues",
    "Vocabulary",
    "family_named",
    "model_flops",
    "parameter_shapes",
    "register_family",
    "token_values",
]
