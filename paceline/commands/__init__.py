"""Commands of the command line. Results go to stdout, progress and notes to stderr."""
