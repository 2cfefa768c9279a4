"""All steps of a recurrence in one launch: one kind of step a file, written as kernels in Triton."""
