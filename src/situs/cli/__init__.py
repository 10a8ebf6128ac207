"""The command line: `main` finds the verb, a class with its flags, which calls the packages below."""
