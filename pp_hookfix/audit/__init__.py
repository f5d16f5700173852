"""``pp-hookfix audit``: what stock torch does to a job, seen while the job runs on it.

- `launch` runs the command and waits for it.
- `hand_outs` looks at what each stage is handed, from one hand-out to the next.
- `hooks` knows the hooks on a tensor and which of them fire; `registrations` who registered them.
- `references` counts who holds a tensor, but for its own hooks (`ownership`); `holders` names them.
- `stages` adds up what was seen of a stage, `findings` is what that amounts to.
- `process_record` writes it down for the command, and `report` puts all processes together.

Nothing here is loaded unless the command asked for it.
"""
