"""Plans engine steps: how much of a prompt to prefill, and which drafts to verify. Chooses the drafters of requests.
Used by the engine and the simulator."""
