"""The terminal and the shell: output, completion, Ctrl-C, errors of the machine."""
