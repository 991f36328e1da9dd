"""Errors that a user can act on. Each message says where, what was found, what was expected and what to do."""

from __future__ import annotations


class LatentSweepError(Exception):
    """Base of every error this package raises on purpose; the command line prints it without a traceback."""


class ConfigError(LatentSweepError):
    """A sweep or benchmark file is not valid; the message lists every fault found."""


class DataError(LatentSweepError):
    """A benchmark's data file is missing or malformed; the message names the file and the row."""


class MissingData(DataError):
    """A benchmark's data file is not on this machine; the message says where it was looked for."""


class NonFiniteLoss(LatentSweepError):
    """The training loss became NaN or infinite; the trial cannot go on with these settings."""


class StorageError(LatentSweepError):
    """A stored file is missing, does not check against its digest, or cannot be written."""


class DeviceLost(LatentSweepError):
    """A GPU has ended this process's work on it; another process can go on."""


class TrackingError(LatentSweepError):
    """The tracking server could not be reached or refused a write; nothing on disk is lost."""


class Terminated(KeyboardInterrupt):
    """SIGTERM has come: everything ends as after Ctrl-C, with another exit code."""


def clause(error: Exception) -> str:
    """Return an error's text without the full stop at its end, for a message that goes on behind it."""
    return str(error).rstrip(". ")
