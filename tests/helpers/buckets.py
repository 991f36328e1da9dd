"""The object store of the tests: a folder behind pyarrow's interface."""

URI = "s3://bucket/sweeps"
