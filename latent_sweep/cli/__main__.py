"""Entry point of `python -m latent_sweep.cli`."""

import sys

from latent_sweep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
