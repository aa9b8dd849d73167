"""How the shipped evalsets are drawn and sealed. A package, as `scenes.py` and the folder `scenes` have one name."""
