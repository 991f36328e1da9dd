"""Servers beyond this machine must ask who calls: whoever reaches a Ray cluster runs code on it, and whoever reaches an
MLflow server changes its results. `run.allow_insecure` says that the network is safe in another way.
"""

from __future__ import annotations

import configparser
import ipaddress
import os
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from latent_sweep.errors import ConfigError
from latent_sweep.security import redact


def check_ray_address(allow_insecure: bool) -> None:
    """Refuse to join a Ray cluster on another machine without a token.

    A cluster of our own, `auto` and loopback addresses pass; a job inherits mode and token from its cluster and passes.

    Raises:
        ConfigError: RAY_ADDRESS names another machine, and RAY_AUTH_MODE is not `token`.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if allow_insecure or address in ("", "auto", "local") or _is_here(_split(address).hostname):
        return
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode.lower() != "token":
        raise ConfigError(
            f"RAY_ADDRESS: found {redact(address)}, another machine, with RAY_AUTH_MODE={mode or '(unset)'}; expected "
            f"RAY_AUTH_MODE=token. Set it here and where the cluster starts, with the cluster's token in "
            f"RAY_AUTH_TOKEN or ~/.ray/auth_token. On a network that nobody else can enter: "
            f"--set run.allow_insecure=true"
        )


def check_tracking_address(uri: str, allow_insecure: bool) -> None:
    """Refuse to send results to an MLflow server on another machine without TLS or without credentials.

    Only http:// and https:// addresses are looked at: databases and Databricks have their own ways.

    Raises:
        ConfigError: the message says which of the two is missing, and what to set.
    """
    parts = _split(uri)
    if allow_insecure or parts.scheme not in ("http", "https") or _is_here(parts.hostname):
        return
    if parts.scheme == "http":
        fault = "without TLS, passwords and results can be read on the way; expected https://, or a server on loopback"
    elif os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1"):
        fault = "MLFLOW_TRACKING_INSECURE_TLS accepts any certificate; name the right one by "
        fault += "MLFLOW_TRACKING_SERVER_CERT_PATH instead"
    elif not (parts.username or _has_mlflow_credentials()):
        fault = "found no credentials; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or write them to "
        fault += "~/.mlflow/credentials), or MLFLOW_TRACKING_TOKEN"
    else:
        return
    raise ConfigError(
        f"MLflow at {redact(uri)}: {fault}. On a network that nobody else can enter: --set run.allow_insecure=true, "
        f"or --allow-insecure for sync and verify"
    )


def _split(address: str) -> SplitResult:
    """The parts of an address; one without a scheme is host:port."""
    try:
        return urlsplit(address if "://" in address else f"//{address}")
    except ValueError as error:
        raise ConfigError(f"{redact(address)}: not an address ({error}); expected e.g. https://host:5000") from error


def _is_here(host: str | None) -> bool:
    """Whether an address's host is the loopback interface; names are not looked up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _has_mlflow_credentials() -> bool:
    """Whether the MLflow client will show who it is, in one of the ways that it knows."""
    alone = ("TOKEN", "AUTH", "AWS_SIGV4", "CLIENT_CERT_PATH")
    if any(os.environ.get(f"MLFLOW_TRACKING_{name}", "").lower() not in ("", "0", "false") for name in alone):
        return True
    file = configparser.ConfigParser(interpolation=None)
    file.read(Path("~/.mlflow/credentials").expanduser())
    names = ("mlflow_tracking_username", "mlflow_tracking_password")
    return all(os.environ.get(name.upper()) or file.get("mlflow", name, fallback="") for name in names)
