-- What happened in a run: run is its uid, payload is not sealed.
CREATE TABLE tx_nrllm_agentrun_event (
    uid INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
    pid int NOT NULL DEFAULT 0,
    run int NOT NULL DEFAULT 0,
    sequence int NOT NULL DEFAULT 0,
    kind varchar(32) NOT NULL DEFAULT '',
    payload mediumtext,
    crdate int NOT NULL DEFAULT 0
);
CREATE INDEX tx_nrllm_agentrun_event_run ON tx_nrllm_agentrun_event (run);
