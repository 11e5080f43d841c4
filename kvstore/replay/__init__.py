"""Replay of request traces on the real index, without payload bytes; see README.md in this folder."""

from __future__ import annotations
