"The `k3` program, which is also `python -m k3lib`."

import sys


def run() -> int:
    "Run the command that the command line names, and return its exit code."
    try:
        from k3lib.cli import main

        return main()
    except KeyboardInterrupt:  # before main listens to signals
        if sys.stderr is not None:
            print(f"k3 {' '.join(sys.argv[1:2])}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
