"""What training scripts share: arguments, runs that can be resumed, optimizers, and the two kinds of tasks."""
