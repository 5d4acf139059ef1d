"""Several processes that run one program together: how they find, agree with and watch each other."""

from jaxpipe.distributed.join import check_flags
from jaxpipe.distributed.log import log, log_to, print_with, say
from jaxpipe.distributed.together import Together

__all__ = ["Together", "check_flags", "log", "log_to", "print_with", "say"]
