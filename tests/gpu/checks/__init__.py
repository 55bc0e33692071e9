"""The checks of scripts/gpu-check that compare whole programs; the programs themselves are in the folder above."""
