import sys

try:
    from k3lib.cli import main
    code = main()
except KeyboardInterrupt:  # before main listens
    code = 130
sys.exit(code)
