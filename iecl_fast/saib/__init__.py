"""SAIB: the block that expands the entropy of a batch of images."""

from iecl_fast.saib.functional import saib
from iecl_fast.saib.jacobian import LogAbsDetJacobian
from iecl_fast.saib.module import SAIB

__all__ = ["SAIB", "LogAbsDetJacobian", "saib"]
