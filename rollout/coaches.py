"""What a coach is shown of a turn and how its reply is read; `rollout.rewards.coach` does the asking.

- `prompt`    one turn as a question
- `verdict`   the reply as numbers
"""
