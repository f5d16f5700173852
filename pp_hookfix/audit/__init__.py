"""``pp-hookfix audit``: what the fault does to a job, seen while the job runs.

`launch` runs the command and waits for it, `watch` looks at what each stage is handed,
`holders` finds who holds a tensor, `notes` writes down what each process saw, and `report`
puts that together. Nothing here is loaded unless the command asked for it.
"""
