"""An object store for the tests of what lies in one, and the nodes that share it."""

import pytest
from helpers.buckets import URI, WholeFiles
from pyarrow.fs import FSSpecHandler, PyFileSystem

from latent_sweep.storage import objects
from latent_sweep.storage.objects import Bucket
from latent_sweep.storage.storage import open_storage


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A folder in the place of a bucket, behind pyarrow's interface; what is put there, in order."""
    put, real = [], Bucket.put

    def recording_put(self, key, content):
        put.append(key)
        real(self, key, content)

    filesystem = PyFileSystem(FSSpecHandler(WholeFiles(auto_mkdir=True)))
    monkeypatch.setattr(objects, "_connect", lambda uri: (filesystem, str(tmp_path / "bucket")))
    monkeypatch.setattr(Bucket, "put", recording_put)
    return put


@pytest.fixture
def node(tmp_path, monkeypatch, bucket):
    """Go to a node: `node("a")` is the storage there; each node has a cache of its own."""

    def go(name):
        monkeypatch.setenv("LATENT_SWEEP_CACHE", str(tmp_path / "node" / name))
        return open_storage(URI)

    return go
