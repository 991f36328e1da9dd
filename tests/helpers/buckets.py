"""The object store of the tests: a folder behind pyarrow's interface."""

from typing import Any

from fsspec.implementations.local import LocalFileSystem

URI = "s3://bucket/sweeps"


class WholeFiles(LocalFileSystem):
    """Files that are there once they are whole, as objects are: readers see the old one until then."""

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" not in mode:
            return super()._open(path, mode, **options)
        file = super()._open(path, mode, **options | {"autocommit": False})
        close = file.close

        def close_and_commit() -> None:
            if not file.closed:
                close()
                file.commit()

        file.close = close_and_commit
        return file
