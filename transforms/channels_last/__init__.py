"""Lay images channels last in memory, from the first convolution of a region to what needs them in order."""

from __future__ import annotations

from .channels_last import ChannelsLast

__all__ = ["ChannelsLast"]
