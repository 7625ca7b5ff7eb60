"""Spectral normalisation of all layers of a network in one call."""

from iecl_fast.spectral.module import SpectralNormHandle, remove_spectral_norm, spectral_norm

__all__ = ["SpectralNormHandle", "remove_spectral_norm", "spectral_norm"]
