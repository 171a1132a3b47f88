"""What training scripts share: arguments, runs that can be resumed, optimizers, the two kinds of tasks, publishing."""
