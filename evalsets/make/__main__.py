"""The command `python -m evalsets.make`."""

from __future__ import annotations

from evalsets.make.shipped import main

if __name__ == "__main__":
    main()
