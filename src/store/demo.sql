-- Three agent runs as an application without hardwrap leaves them: in clear. Run again, it replaces them.
DELETE FROM tx_nrllm_agentrun WHERE uuid LIKE 'demo0000-0000-4000-8000-%';
INSERT INTO tx_nrllm_agentrun (pid, uuid, status, configuration_identifier, be_user, crdate, tstamp, queued_request) VALUES
(0, 'demo0000-0000-4000-8000-000000000001', 'queued', 'demo', 1, 1790000000, 1790000000, '{"prompt":"DEMO-SECRET-1: draft the dismissal letter for employee 4711","actor":{"uid":1,"admin":false},"tools":["mail.draft"]}');
INSERT INTO tx_nrllm_agentrun (pid, uuid, status, configuration_identifier, be_user, crdate, tstamp, suspended_state) VALUES
(0, 'demo0000-0000-4000-8000-000000000002', 'waiting_for_approval', 'demo', 1, 1790000100, 1790000100, '{"messages":[{"role":"user","content":"DEMO-SECRET-2: the patient in room 12 has asked for her results"}],"pendingCalls":[{"id":"call_1","type":"function","function":{"name":"record.read","arguments":{"patient":"DEMO-SECRET-3"}}}],"iterations":1}'),
(0, 'demo0000-0000-4000-8000-000000000003', 'waiting_for_input', 'demo', 1, 1790000200, 1790000200, '{"messages":[{"role":"user","content":"DEMO-SECRET-4: wire 25,000 to DE02120300000000202051 – grüße, 東京"}],"pendingCalls":[{"id":"call_1","type":"function","function":{"name":"ask","arguments":[]}}],"iterations":2,"inputToolName":"ask"}');
