import sys

from pp_hookfix.command import main

if __name__ == "__main__":
    sys.exit(main())
