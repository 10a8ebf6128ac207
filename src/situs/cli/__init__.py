"""The command line: `main` finds the verb, one file a verb holds its flags (`Args`) and calls the packages below."""
