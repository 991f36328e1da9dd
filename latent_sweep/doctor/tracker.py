"""The tracker: whether it may be talked to, can be reached, and takes what a sweep writes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from latent_sweep.doctor.findings import Finding, fault, ok, warning
from latent_sweep.errors import ConfigError, TrackingError
from latent_sweep.sweep.tracking_uris import address_faults, place_faults
from latent_sweep.tracking.addresses import check_tracking_address
from latent_sweep.tracking.mlflow import tracking_uri
from latent_sweep.tracking.mlflow_probe import Probe, probe_tracker

WHERE = "run.tracking.uri, or MLFLOW_TRACKING_URI"


def check_tracker(uri: str | None, allow_insecure: bool, needed: bool = True) -> Iterator[Finding]:
    """Write a run into MLflow and delete it; nothing is sent to an address that a run would refuse.

    Args:
        uri: as in a sweep file.
        allow_insecure: as `run.allow_insecure`: what is not safe is then a warning.
        needed: whether a sweep was given, which is tracked; without one, a missing MLflow is a warning.
    """
    address = tracking_uri(uri)
    if uri == "none":
        yield ok("tracker", "none: this sweep is not tracked")
        return
    if faults := address_faults(address) or place_faults(address):
        yield fault("tracker", "; ".join(faults), f"an MLflow that takes runs ({WHERE})")
        return
    if find_spec("mlflow") is None:
        finding = fault if needed else warning
        advice = "`pip install mlflow` in the version above, or do without: run.tracking.uri: none"
        yield finding("tracker", "not tried: MLflow is not installed", f"an MLflow that takes runs ({WHERE})", advice)
        return
    try:
        check_tracking_address(address, allow_insecure=False)
    except ConfigError as error:
        if not allow_insecure:
            yield fault("tracker", str(error))
            return
        yield warning(
            "tracker", str(error), advice="run.allow_insecure lets it pass; see that nobody else is on the way"
        )
    try:
        found = probe_tracker(address)
    except TrackingError as error:
        yield fault("tracker", f"{address}: {error}", f"an MLflow that takes runs ({WHERE})", advice_for(str(error)))
        return
    yield ok("tracker", f"{address}: a run written, read, deleted in {found.seconds:.2f} s")
    yield from _versions(found)


def advice_for(said: str) -> str:
    """Say what to do about an error of MLflow's, by what it says."""
    lower = said.lower()
    if any(mark in lower for mark in ("certificate", "ssl")):
        return "the server's certificate is not trusted here: name its authority by MLFLOW_TRACKING_SERVER_CERT_PATH"
    if any(mark in lower for mark in ("401", "403", "unauthorized", "forbidden", "permission_denied")):
        return (
            "it answers, but refuses who asks: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN, of somebody who may create experiments"
        )
    if "out of date" in lower or "upgrade" in lower or "revision" in lower:
        return "the database is of another version of MLflow: back it up, then `mlflow db upgrade URI`, or use another"
    return (
        f"check that the server runs and that this machine reaches it; or name another by {WHERE}; `none` does without"
    )


def _versions(found: Probe) -> Iterator[Finding]:
    if found.server is None:
        return
    here, there = (version.split(".")[:2] for version in (found.client, found.server))
    said = f"{found.server} there, {found.client} here"
    if here == there:
        yield ok("MLflow", said)
    else:
        advice = "runs are taken; the saved comparison may look plainer. Bring the server to the version here"
        yield warning("MLflow", said, "the same first two numbers", advice)
