"""From the words of a command line to the config of a verb: flags, help, mistakes, completion."""
