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
    finally:
        # Python notes that a KeyboardInterrupt has left code that it was given as a string. Modules make their classes
        # from such code while they are imported. `python -m` then ends itself by SIGINT, whatever the exit code is,
        # although the KeyboardInterrupt was caught long ago. The next string that runs takes the note back.
        exec("")


if __name__ == "__main__":
    sys.exit(run())
