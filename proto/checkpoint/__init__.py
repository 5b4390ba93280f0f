"""The files of a checkpoint, which any program can open, and their manifest, which is written last.

    URL/save-000001/                     one checkpoint, complete once manifest.json is there
        manifest.json                    the list of its files, with sizes and checksums (manifest.py)
        rows.SHARD.N.safetensors         rows of a table, or of several small ones (row_parts.py)
        slots.SHARD.safetensors          the last version given in each slot
        worker.RANK.safetensors          dense tower, optimizers, reader and random state of a worker (state_tree.py)
        dense/shard-N-*.safetensors      the parts of a dense tower that processes share (dense_files.py)

``folder`` reads and writes these files by URL (fsspec); ``tensor_file`` implements their format.
``file_check`` compares a file with its entry in the manifest.
"""
