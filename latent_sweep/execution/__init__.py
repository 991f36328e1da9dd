"""How trials are executed: the driver, Ray Tune and its workers, DeepSpeed, or this process alone."""
