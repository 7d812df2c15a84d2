"""The sub-commands of the command line."""

#: What erases the bar on the terminal; empty while there is none.
erase = ""
