"""Stock loops of training frameworks on the hlo device: they choose it themselves, and their losses
are those of the CPU. Each file is skipped where its framework is not installed: `pip install -c
constraints.txt -e '.[frameworks]'`."""
