"""Acting: teams of agents on tasks, recorded turn by turn; nothing here imports torch, Ray or an engine until it is used."""
