"""Supervised fine-tuning: what every rank runs. The command is ``openrlhf_ext.cli.train_sft``."""
