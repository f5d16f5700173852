"""Real pipeline training, without and with the fix, on the torch installed here.

`ranks` starts the processes, `schedules` builds torch's schedules, `training`
runs and records the steps, `verify` compares the records, and `gloo_faults`
steps round what stock torch cannot do over Gloo. `bare_stage` is for what needs
no ranks. The command, the tests and the benchmarks share them; the fix itself
uses none.
"""
