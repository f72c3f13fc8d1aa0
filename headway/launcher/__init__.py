"""`headway up`: the whole system on one machine, each service its own process, from one experiment file."""
