"""environment.json: what a run ran on."""

import json
import os
import platform
import sys
from datetime import datetime, timezone
from importlib import metadata

import torch

from iecl_fast import __version__
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.folder import write_json

PACKAGES = ("torchvision", "lightning-fabric", "numpy", "scikit-learn", "triton")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")


def record_environment(path, fabric):
    """Write environment.json; what a resumed run runs on is added to the list under "resumed".

    Args:
        path: the file.
        fabric: `lightning_fabric.Fabric` of the run.
    """
    environment = describe_environment(fabric)
    if path.exists():
        try:
            first = json.loads(path.read_text())
            environment = first | {"resumed": [*first.get("resumed", []), environment]}
        except (ValueError, TypeError, AttributeError):
            raise UsageError(f"{path} is damaged: it must hold what the run began on; move it away to go on") from None
    write_json(path, environment)


def describe_environment(fabric):
    """Versions, hardware, threads and the command line, as plain values."""
    device = fabric.device
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            "iecl_fast": __version__,
            "torch": str(torch.__version__),  # with its +cpu or +cu...
            **{name: _version(name) for name in PACKAGES},
        },
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "devices": fabric.world_size,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
