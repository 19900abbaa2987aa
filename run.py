"""The whole job in one command: `python run.py` does what config.json says; `--help` tells what else there is."""

import sys

from distill.cli import main

if __name__ == "__main__":
    sys.exit(main())
