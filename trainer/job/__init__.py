"""What a run is and needs before it starts: the job record, its checks, its folders, the first lines."""
