"""An object store for tests: a folder behind pyarrow's interface."""

from typing import Any

from fsspec.implementations.local import LocalFileSystem

URI = "s3://bucket/sweeps"


class WholeFiles(LocalFileSystem):
    """Files that appear only when complete, like objects; readers see the old file until then."""

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
