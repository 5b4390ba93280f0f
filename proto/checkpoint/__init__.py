"""What a checkpoint is on disk: files that any program can open, and a manifest that is written last.

    URL/save-000001/                     one checkpoint; without manifest.json it is none
        manifest.json                    what belongs to it, with sizes and checksums (manifest.py)
        rows.SHARD.N.safetensors         rows of a table, or of several small ones (row_parts.py)
        slots.SHARD.safetensors          the last version given in each slot
        worker.RANK.safetensors          dense side, optimizers, reader, random numbers of a worker (state_tree.py)

``folder`` reads and writes them by URL (fsspec), ``tensor_file`` is the format.
"""
