"The `k3` program, which is also `python -m k3lib`."

import contextlib
import os
import sys


def run() -> int:
    "The exit code of the command on the command line. After a signal, this function ends the process with its code."
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of numpy's products, which no command uses: else one a core
    try:
        _occupy_closed_outputs()
        from k3lib.cli import main

        code = main()
    except KeyboardInterrupt:  # before main listens to signals
        _complain(f"k3 {' '.join(sys.argv[1:2])}: interrupted")
        code = 130
    finally:
        _forget_unwritten()
    return code if code < 128 else _end_at_once(code)


def _complain(line):
    "Write a line to standard error, as far as that can be written."
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(line, file=sys.stderr)


def _occupy_closed_outputs():
    """Open the null device in the place of standard streams that were closed before the start.

    Otherwise the first file that is opened gets the number 1 or 2, to which C code of libraries writes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with open(os.devnull, "r+b", buffering=0) as null:  # has the lowest free number itself
                other = os.dup(null.fileno())
            os.dup2(other, number)
            os.close(other)


def _forget_unwritten():
    """Let go of what an output could not take.

    Python flushes both outputs on its way out, and where that fails it ends with a second message and exit code 120.
    """
    for output in sys.stdout, sys.stderr:
        try:
            output.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), output.fileno())


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
