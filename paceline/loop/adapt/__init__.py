"""Keep a drafter fitted to its traffic: see when acceptance falls, decide what to do, and prove that a candidate is better."""
