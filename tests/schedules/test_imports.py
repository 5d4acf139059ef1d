"""Schedules, their lowering and their pictures load neither JAX nor matplotlib."""

import subprocess
import sys


def test_no_jax_is_imported():
    program = (
        "import sys, jaxpipe.schedules, jaxpipe.lowering, jaxpipe.drawing, jaxpipe.show, jaxpipe.optimize\n"
        "import jaxpipe.launch\n"
        "jaxpipe.show.main(['1f1b', '--num_devices=2', '--num_microbatches=2'])\n"
        "jaxpipe.optimize.main(['--num_devices=1', '--num_microbatches=1', '--memory_bound=1', '--num_trials=1'])\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'optax', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
