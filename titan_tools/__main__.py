"""`python -P -m titan_tools …`: how ranks are started; `-P` keeps a `trainer` folder of the working directory out."""

from titan_tools.cli import main

if __name__ == "__main__":
    main()
