"The `k3` program, which is also `python -m k3lib`."

import sys


def run() -> int:
    "The exit code of the command on the command line."
    try:
        from k3lib.cli import main

        return main()
    except KeyboardInterrupt:  # before main listens
        return 130


if __name__ == "__main__":
    sys.exit(run())
