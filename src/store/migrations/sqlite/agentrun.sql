-- The agent runs of nr_llm, for those who have no TYPO3 to make the table.
CREATE TABLE tx_nrllm_agentrun (
    uid INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
    pid int NOT NULL DEFAULT 0,
    uuid varchar(36) NOT NULL DEFAULT '',
    status varchar(32) NOT NULL DEFAULT 'queued',
    configuration_uid int NOT NULL DEFAULT 0,
    configuration_identifier varchar(150) NOT NULL DEFAULT '',
    be_user int NOT NULL DEFAULT 0,
    iterations int NOT NULL DEFAULT 0,
    truncated smallint NOT NULL DEFAULT 0,
    total_prompt_tokens int NOT NULL DEFAULT 0,
    total_completion_tokens int NOT NULL DEFAULT 0,
    total_tokens int NOT NULL DEFAULT 0,
    estimated_cost decimal(10,6) NOT NULL DEFAULT 0,
    error_class varchar(255) NOT NULL DEFAULT '',
    termination_reason varchar(64) NOT NULL DEFAULT '',
    -- Sealed while a run waits for a human, kept while it runs again, '' once it has ended.
    suspended_state mediumtext,
    -- Sealed from the first moment, kept while the run is queued and runs, '' once it has ended.
    queued_request mediumtext,
    claimed_by varchar(64) NOT NULL DEFAULT '',
    lease_expires int NOT NULL DEFAULT 0,
    requeue_count int NOT NULL DEFAULT 0,
    pending_effect smallint NOT NULL DEFAULT 0,
    started_at int NOT NULL DEFAULT 0,
    finished_at int NOT NULL DEFAULT 0,
    tstamp int NOT NULL DEFAULT 0,
    crdate int NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX tx_nrllm_agentrun_uuid ON tx_nrllm_agentrun (uuid);
CREATE INDEX tx_nrllm_agentrun_status ON tx_nrllm_agentrun (status, crdate);
