"""Import torch and Horovod, and print what they are: `python -m elastic_trainer.doctor.libraries`.

facts → here, in a process of its own: a library that does not fit may end it by a signal
"""

from __future__ import annotations

import json
from typing import Any


def libraries() -> dict[str, Any]:
    """Return the facts of torch and Horovod, and the errors of their imports."""
    facts: dict[str, Any] = {}
    try:
        import torch

        facts["torch"] = torch.__version__
        facts["cuda"] = torch.version.cuda or ""
        numbers = range(torch.cuda.device_count())
        facts["gpus"] = [torch.cuda.get_device_name(n) for n in numbers]
        facts["capabilities"] = ["{}.{}".format(*torch.cuda.get_device_capability(n))
                                 for n in numbers]
        if facts["gpus"]:
            torch.ones(1, device="cuda").item()
    except BaseException as error:
        facts["torch_error"] = repr(error)
    try:
        import horovod.torch as hvd

        facts["gloo"], facts["nccl"] = bool(hvd.gloo_built()), bool(hvd.nccl_built())
    except BaseException as error:
        facts["horovod_error"] = repr(error)
    return facts


if __name__ == "__main__":
    print("\nFACTS" + json.dumps(libraries()))
