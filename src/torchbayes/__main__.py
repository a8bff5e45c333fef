"""`python -m torchbayes`, also under torchrun, is the command line."""

from torchbayes.cli import main

if __name__ == "__main__":
    main()
