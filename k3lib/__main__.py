"The `k3` program, which is also `python -m k3lib`."

import contextlib
import os
import sys


def run() -> int:
    "The exit code of the command on the command line. After a signal, this function ends the process with its code."
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of numpy's products, which no command uses: else one a core
    try:
        os.getcwd()
    except OSError:  # libraries look for their files there
        print("k3: the current folder was removed: change to another one", file=sys.stderr)
        return 2
    try:
        from k3lib.cli import main

        code = main()
    except KeyboardInterrupt:  # before main listens to signals
        if sys.stderr is not None:
            print(f"k3 {' '.join(sys.argv[1:2])}: interrupted", file=sys.stderr)
        code = 130
    return code if code < 128 else _end_at_once(code)


def _end_at_once(code):
    """Flush the two outputs and end the process, without Python's own way out.

    A signal may have left a thread in compiled code, which must not run while Python takes its memory apart. And
    Python would end `python -m k3lib` by SIGINT, whatever `code` is, if the KeyboardInterrupt has passed through code
    that was given as a string, as modules make classes from it while they are imported.
    """
    for output in sys.stdout, sys.stderr:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            output.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(run())
